"""Adapters: small trained layers at named places of a frozen model."""
