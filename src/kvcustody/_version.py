"""The version of this distribution, for modules that say which software wrote something."""

from __future__ import annotations

__version__ = "0.1.0"
