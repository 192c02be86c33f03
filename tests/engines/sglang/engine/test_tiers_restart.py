"""What files keep is found by the next process, after an orderly stop and after kill -9; all of it is on record."""

from __future__ import annotations

from sqlalchemy import select

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from standins.engines.sglang.sglang_tiers import SMALL, WHOLE, clean, displace, prompt, tiered


def test_files_are_found_after_a_restart_and_after_a_kill(start, new_deployment):
    engine, site, named = tiered(start, new_deployment, "host nvme", page_size=4)
    mine = prompt(13)
    first = engine.run(mine, site.token("acme"))
    displace(engine)
    assert engine.run(mine, site.token("acme")).cached_tokens == WHOLE
    engine.probe("to_files")  # what `host` has goes down, as where it is full
    engine.stop()
    engine.close()

    second = start(deployment=site, settings=named, **SMALL, page_size=4)
    assert second.run(mine, site.token("beta")).cached_tokens == 0
    result = second.run(mine, site.token("acme"))
    assert result.cached_tokens == WHOLE and result.tokens == first.tokens
    clean(second)
    second.kill()
    second.close()

    third = start(deployment=site, settings=named, **SMALL, page_size=4)
    assert third.run(mine, site.token("beta")).cached_tokens == 0
    result = third.run(mine, site.token("acme"))
    assert result.cached_tokens == WHOLE and result.tokens == first.tokens
    assert third.probe("scan", recover=True) == []
    planted = site.folder / "tier" / "ab" / ("ab" * 32)  # the control: a file that nobody stored
    planted.parent.mkdir(mode=0o700, exist_ok=True)
    planted.write_bytes(bytes(4096))
    result = third.probe("scan", recover=True)
    assert len(result) == 1 and not planted.exists(), result
    assert third.probe("scan", recover=True) == []
    clean(third)
    third.probe("erase", tenant="acme")
    assert all("acme" not in one["tenants"] for one in third.probe("tiers").values())
    assert third.run(mine, site.token("acme")).cached_tokens == 0
    displace(third)
    third.stop()

    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        total, copies = coverage(connection).total, copy_coverage(connection).by_tier()
        lives = connection.execute(select(incarnations).where(incarnations.c.device == "cpu")).all()
        left, report = gaps(connection), fsck(connection)
    ledger.dispose()
    print("copies:", *copies, sep="\n  ")
    assert {one.tier for one in copies} == {"host", "nvme"}
    assert all(one.due > 0 and one.covered + one.unproven == one.due for one in copies)
    assert all(one.late == one.disputed == one.waiting == 0 for one in copies)
    assert [one.unproven for one in copies if one.tier == "nvme"] == [0], "files are found, and end on record"
    assert total.due > total.covered > 500, "what the killed process had on the device is unproven"
    assert len(lives) == 3 and left == () and report.ok, report.problems
