"""vLLM under governance: a plugin and a connector, without a fork.

See docs/reference/engines/vllm.md; docs/build/adr/ has the reasons.
"""
