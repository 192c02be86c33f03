"""The plugin's state in this process: set by `plugin`, read by it and by the connector."""

from __future__ import annotations

was_tried = False
"""`plugin.register` has run."""

is_installed = False
"""Every patch is in place."""

governs = False
"""The scheduler that was made last has our connector."""
