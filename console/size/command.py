"""The commands of `kvcustody size`; a config.json without a command is sized as by `size device`."""

from __future__ import annotations

from typing import Any

import typer

from kvcustody.console.command import CustodyGroup
from kvcustody.console.size.device import EPILOG as DEVICE_EPILOG
from kvcustody.console.size.device import size as device
from kvcustody.console.size.evidence import EPILOG as LEDGER_EPILOG
from kvcustody.console.size.evidence import evidence

_DEVICE = "device"
_HELP = ("-h", "--help")


class SizeGroup(CustodyGroup):
    """A group in which a config.json, or its options, need no command name before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments, with `device` in front where they name no command."""
        if args and args[0] not in self.commands and args[0] not in _HELP:
            args = [_DEVICE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=SizeGroup,
    no_args_is_help=True,
    help="Size the KV cache of a model on a device, or the evidence of a workload in a ledger.",
    epilog="Example: `kvcustody size config.json --gpu-memory 80GiB` (the same as `kvcustody size device`)",
)
app.command(_DEVICE, epilog=DEVICE_EPILOG)(device)
app.command("ledger", epilog=LEDGER_EPILOG)(evidence)
