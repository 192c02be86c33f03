"""The transparency log: Merkle trees, tiles, checkpoints, signed notes and proofs (RFC 6962, C2SP tlog-*)."""
