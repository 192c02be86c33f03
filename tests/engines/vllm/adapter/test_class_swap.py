"""A swapped object keeps what it had, and its attributes in a dict of its own (versions.swap_class)."""

from __future__ import annotations

from kvcustody.integrations.vllm.versions import swap_class


class Pool:
    """Something of vLLM's."""

    def __init__(self) -> None:
        self.size, self.free = 8, 5


class Governed(Pool):
    """Ours."""


def test_a_swapped_object_keeps_its_attributes() -> None:
    pool = Pool()
    swap_class(pool, Governed)
    assert isinstance(pool, Governed)
    pool.free = 4
    assert vars(pool) == {"size": 8, "free": 4}


def test_it_gets_a_dict_of_its_own() -> None:
    """Swapping alone leaves the one that shares its keys with the class, which the interpreter reads slowly."""
    swapped, control = Pool(), Pool()
    before, left = vars(swapped), vars(control)
    swap_class(swapped, Governed)
    control.__class__ = Governed
    assert vars(control) is left
    assert vars(swapped) is not before
