"""One stage a file: its first line says what it asks; `run(report, lab)` makes checks, and skips with a reason."""

STAGES = {  # seconds that each may take, the telling ones first; together less than `gpu.__main__.SECONDS`
    "fingerprint": 20,
    "ordering": 60,
    "captures": 60,
    "kernel_tests": 140,
    "copies": 70,
    "far_addresses": 60,
    "compiles": 60,
    "sanitizer": 200,
    "residue": 70,
    "late_audits": 40,
    "bandwidth": 40,
    "decode_latency": 40,
    "transformers_engine": 180,
    "vllm_engine": 330,
    "conformance": 100,
}
