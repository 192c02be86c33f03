"""vLLM under governance: a plugin and a connector, no fork. See docs/vllm.md and docs/adr/0007-vllm-connector.md."""
