"""Every row of every tile table of a Triton kernel is one that Triton can compile; `make test-all` compiles them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flashmoe_science.attention.backward import plan as backward_plan
from flashmoe_science.attention.decode import plan as decode_plan
from flashmoe_science.attention.forward import triton_plan
from flashmoe_science.moe import tiles

MODULES = (triton_plan, decode_plan, backward_plan, tiles)
TABLES = {
    f"{module.__name__.partition('.')[2]}.{name}": table
    for module in MODULES
    for name, table in vars(module).items()
    if isinstance(table, dict) and name.isupper()
}


def configs(table: Any) -> Iterator[Any]:
    """Yield every dataclass within a table, however deep."""
    if dataclasses.is_dataclass(table):
        yield table
        yield from configs([getattr(table, field.name) for field in dataclasses.fields(table)])
    elif isinstance(table, Mapping):
        yield from configs([*table.values()])
    elif isinstance(table, (list, tuple)):
        for item in table:
            yield from configs(item)


@pytest.mark.parametrize("name", TABLES)
def test_tiles_are_powers_of_two(name):
    """Sizes of blocks and numbers of warps; and stages are few."""
    found = [*configs(TABLES[name])]
    assert found
    for config in found:
        for field, value in dataclasses.asdict(config).items():
            if field.startswith("block_") or field == "num_warps":
                assert value.bit_count() == 1, config
            elif field == "num_stages":
                assert 1 <= value <= 6, config
