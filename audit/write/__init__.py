"""The path of an event into the ledger: queue, group commit, trees, the local spill and its replay."""
