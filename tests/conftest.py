"""First of all the environment, before anything is imported that reads it; then what tests share, from `support`."""

from support import environment

HOME = environment.prepare()

pytest_plugins = ["support.selection", "support.failures", "support.fixtures"]


def pytest_unconfigure() -> None:
    environment.remove(HOME)
