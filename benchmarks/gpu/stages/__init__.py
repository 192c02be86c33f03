"""One stage a file: `LIMIT_SECONDS`, and `run(report, lab)`, which makes checks and skips with a reason."""

STAGES = (  # the telling ones first
    "fingerprint",
    "ordering",
    "captures",
    "kernel_tests",
    "far_addresses",
    "compiles",
    "sanitizer",
    "residue",
    "late_audits",
    "bandwidth",
    "decode_latency",
    "transformers_engine",
    "vllm_engine",
    "conformance",
)
