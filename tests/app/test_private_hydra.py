"""Hydra's private names are there."""

from private_names import sentence

from fedbench.app import private_hydra


def test_hydra_has_them() -> None:
    assert sentence("hydra-core", private_hydra.NAMES, "fedbench/app/private_hydra.py") == ""
