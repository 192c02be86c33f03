"""Ahead-of-time compilation of the kernels for devices that are not here, and what the machine code says.

`python tests/lib/standins/kernels/kernel_targets.py` prints, for each kernel and target, the width of its memory
accesses, its registers and its spills; it needs Triton but no GPU. Tests hold the same figures.

- With 16-byte alignment every bulk store and load of a kernel is 16 bytes wide, on every target.
- No kernel spills a register to local memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcustody.errors import DeviceError
from kvcustody.kernels.launch import HAS_TRITON, INTERPRETED, warps
from kvcustody.kernels.segment import WIDE_BYTES, tile_bytes_max

CUDA_TARGETS = (80, 90, 100)
HIP_TARGETS = ("gfx942",)
KERNELS = (
    "scrub",
    "scrub_read_back",
    "scrub_persistent",
    "verify",
    "copy",
    "exchange_out",
    "exchange_in",
    "checksum",
)

_LISTS = {
    "scrub": ("entries",),
    "verify": ("block_list",),
    "copy": ("source_list", "target_list"),
    "exchange": ("block_list",),
    "checksum": ("block_list",),
}
_OUTPUT: dict[str, dict[str, str]] = {
    "scrub": {"tally": "*i64", "published": "*i64", "flags": "*i32", "pairs": "i32"},
    "verify": {"flags": "*i32"},
    "copy": {},
    "exchange": {"tile_offset": "*i64", "rows": "*u8"},
    "checksum": {"word_keys": "*i64", "tile_keys": "*i64", "sums": "*i64"},
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, compiled for one target."""

    kernel: str
    target: str
    alignment_bytes: int
    assembly: str  # PTX or AMDGCN
    stores_bytes: frozenset[int]  # widths of the bulk stores, bytes a thread
    loads_bytes: frozenset[int]  # widths of the bulk loads (the pointer table's 8-byte loads left out)
    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_kernel(
    kernel: str,
    target: int | str,
    *,
    alignment_bytes: int = WIDE_BYTES,
    tile_bytes: int | None = None,
) -> Compiled:
    """Compile `kernel` for an NVIDIA compute capability (80, 90, 100) or an AMD architecture (`gfx942`)."""
    if not HAS_TRITON or INTERPRETED:
        raise DeviceError("compiling needs triton, and TRITON_INTERPRET unset", kernel=kernel)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_triton

    tile_bytes = tile_bytes or tile_bytes_max(alignment_bytes)
    operation, _, variant = kernel.partition("_")
    function = _function(operation)
    pointers = (*_LISTS[operation], "tile_address", "tile_stride", "tile_bytes")
    types = dict.fromkeys(pointers, "*i64") | _OUTPUT[operation] | {"blocks": "i32", "tiles": "i32"}
    constants: dict[str, int | bool] = {"ALIGNMENT": alignment_bytes}
    if operation == "scrub":
        constants |= {"SPAN_BYTES": tile_bytes, "PERSISTENT": variant == "persistent"}
        constants |= {"READ_BACK": variant == "read_back", "FAULTY": False, "STREAMING": False}
    else:
        constants["TILE_BYTES"] = tile_bytes
    if operation == "exchange":
        constants["OUT"] = variant == "out"
    signature = types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    options = {"num_warps": warps(tile_bytes)}
    if isinstance(target, int):
        built = compile_triton(source, target=GPUTarget("cuda", target, 32), options=options)
        return _nvidia(kernel, target, alignment_bytes, built.asm["ptx"], built.asm["cubin"])
    built = compile_triton(source, target=GPUTarget("hip", target, 64), options=options)
    return _amd(kernel, target, alignment_bytes, built.asm["amdgcn"])


def _function(kernel: str) -> Any:
    from kvcustody.kernels import checksum, copy, scrub, verify

    modules: dict[str, Any] = {
        "scrub": scrub,
        "verify": verify,
        "copy": copy,
        "exchange": copy,
        "checksum": checksum,
    }
    return getattr(modules[kernel], f"{kernel}_kernel")


_PTX = re.compile(r"\b(ld|st)(?:\.volatile)?\.global((?:\.[\w:]+)*?)(?:\.v(\d))?\.[bfsu](8|16|32|64)\b")


def _nvidia(kernel: str, capability: int, alignment: int, ptx: str, cubin: bytes) -> Compiled:
    widths: dict[str, set[int]] = {"ld": set(), "st": set()}
    for access, _, lanes, bits in _PTX.findall(ptx):
        if not (access == "ld" and bits == "64" and lanes in ("", "1")):  # the pointer table
            widths[access].add(int(lanes or 1) * int(bits) // 8)
    registers, stack, local = _resources(cubin)
    return Compiled(
        kernel, f"sm_{capability}", alignment, ptx, frozenset(widths["st"]), frozenset(widths["ld"]),
        registers, stack, local,
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, stack bytes, local bytes) by Triton's bundled cuobjdump; spills show as stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise DeviceError(f"cuobjdump reported no resource usage: `{text.strip()}`")
    return int(found[1]), int(found[2]), int(found[3])


def _amd(kernel: str, architecture: str, alignment: int, assembly: str) -> Compiled:
    width = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1, "ubyte": 1}

    def widths(verb: str) -> frozenset[int]:
        return frozenset(
            width[name] for name in re.findall(rf"(?:global|buffer|flat)_{verb}_(\w+?)\b", assembly) if name in width
        )

    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    spills = 4 * (figure("vgpr_spill_count") + figure("sgpr_spill_count"))
    return Compiled(
        kernel, architecture, alignment, assembly, widths("store"), widths("load"),
        figure("vgpr_count"), figure("private_segment_fixed_size"), spills,
    )  # fmt: skip


def main() -> None:
    """Print one line for each kernel and target."""
    print(f"{'kernel':18}{'target':9}{'stores':>10}{'loads':>10}{'registers':>11}{'stack':>7}{'spills':>8}")
    for kernel in KERNELS:
        for target in (*CUDA_TARGETS, *HIP_TARGETS):
            one = compile_kernel(kernel, target)
            stores, loads = (",".join(map(str, sorted(x))) for x in (one.stores_bytes, one.loads_bytes))
            print(
                f"{one.kernel:18}{one.target:9}{stores or '-':>10}{loads or '-':>10}"
                f"{one.registers:>11}{one.stack_bytes:>7}{one.spill_bytes:>8}"
            )


if __name__ == "__main__":
    main()
