"""Adapters: small trained layers that are inserted at named layers of a frozen model."""
