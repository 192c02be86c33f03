"""vLLM under governance: a plugin and a connector, no fork. See docs/start/vllm.md; why so: docs/build/adr/."""
