"""A run: its parts built, its rounds played, evaluated, recorded and saved."""
