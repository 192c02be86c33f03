"""The machine code for devices that are not here: 16-byte accesses, no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


from kvcustody.kernels.launch import INTERPRETED
from standins.kernels.kernel_targets import CUDA_TARGETS, HIP_TARGETS, KERNELS, compile_kernel

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
# beside the bulk: 8 bytes of the count that is told at the end, 4 of a block's flag
STORES = {
    "scrub": {8, 16},
    "scrub_read_back": {4, 8, 16},
    "scrub_persistent": {8, 16},
    "verify": set(),
    "copy": {16},
    "exchange_out": {16},
    "exchange_in": {16},
    "checksum": set(),
}
LOADS = {
    "scrub": set(),
    "scrub_read_back": {16},
    "scrub_persistent": set(),
    "verify": {16},
    "copy": {16},
    "exchange_out": {16},
    "exchange_in": {16},
    "checksum": {16},
}


POINTERS = {8}  # the loop's pointer table, and a checksum's keys, go through vector loads there


@pytest.mark.parametrize("target", [*CUDA_TARGETS, *HIP_TARGETS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_wide_accesses_and_no_spills(kernel, target):
    built = compile_kernel(kernel, target)
    assert built.stores_bytes == STORES[kernel]
    loads = built.loads_bytes - (
        POINTERS if target == "gfx942" and kernel in ("scrub_persistent", "checksum") else set()
    )
    assert loads == LOADS[kernel]
    assert (built.stack_bytes, built.spill_bytes) == (0, 0)
    assert 0 < built.registers <= (64 if isinstance(target, int) else 128)


@pytest.mark.parametrize("kernel", KERNELS)
def test_positive_control_without_the_hints_accesses_are_narrow(kernel):
    built = compile_kernel(kernel, 90, alignment_bytes=4)
    assert 16 not in built.stores_bytes | built.loads_bytes
    assert (built.stores_bytes | built.loads_bytes) - {8} == {4}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("alignment", [8, 4, 1])
def test_the_narrow_paths_do_not_spill(kernel, alignment):
    built = compile_kernel(kernel, 90, alignment_bytes=alignment)
    assert (built.stack_bytes, built.spill_bytes) == (0, 0)


def test_positive_control_a_tile_too_large_is_seen_to_spill():
    built = compile_kernel("copy", 90, alignment_bytes=1, tile_bytes=16384)
    assert built.stack_bytes > 0
