"""docs/reference/engines/sglang.md says of tiers what the kept files say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
RATIO = {"value": 1.234, "low": 1.1, "high": 1.3}
RESULT = {
    "page_size": 4,
    "scheduler_cpu": RATIO,
    "scheduler_cpu_without_tier": RATIO,
    "tier_us_per_request": {"median_us": 1520.0},
    "tokens_per_second": RATIO,
    "first_token": {"restored_over_computed": RATIO, "us": {"computed": {"median_us": 345_600.0}}},
}


def benchmark() -> ModuleType:
    """The benchmark, whose engines nobody starts."""
    spec = importlib.util.spec_from_file_location("sglang_cost", ROOT / "benchmarks" / "engines" / "sglang_cost.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_page_says_what_is_kept(tmp_path: Path) -> None:
    cost, page = benchmark(), tmp_path / "page.md"
    text = (ROOT / "docs" / "reference" / "measurements" / "engines.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    cost.write_page(page, ROOT / "benchmarks" / "results")
    assert page.read_text(encoding="utf-8") == text

    (tmp_path / "sglang-tiers-cpu-page4.json").write_text(json.dumps(RESULT), encoding="utf-8")
    cost.write_page(page, tmp_path)
    said = page.read_text(encoding="utf-8")
    assert said != text, "control: other figures are told"
    assert "| 4 | 1.23 (1.10–1.30) | 1.23 (1.10–1.30) | 1.5 ms | 1.23 (1.10–1.30) |" in said
    assert said.split(cost.END)[1] == text.split(cost.END)[1], "nothing else changes"
