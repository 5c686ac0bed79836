"""Hydra's private names are there."""

from private_names import sentence

from fedbench.app import private_hydra


def test_hydra_has_them() -> None:
    assert sentence("hydra-core", private_hydra.NAMES, "fedbench/app/private_hydra.py") == ""


def test_the_sweeper_is_the_one_that_hydra_has_now() -> None:
    """Hydra executes its plugins again in the same module, whose classes are others then."""
    import hydra._internal.core_plugins.basic_sweeper as module

    assert private_hydra.basic_sweeper().BasicSweeper is module.BasicSweeper
