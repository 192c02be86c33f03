"""vLLM under governance: a plugin and a connector, without a fork. See docs/start/vllm.md; reasons: docs/build/adr/."""
