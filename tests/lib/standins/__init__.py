"""What tests share: stand-ins for engines, stores, devices and people, and the processes that tests kill."""

from pathlib import Path

PLACE = Path(__file__).parent
LIBRARY = PLACE.parent  # what a process of its own needs on its path to import this package
