"""The version of the installed package, which its build took from the git tags."""

from importlib.metadata import version

VERSION = version("slipstream")
