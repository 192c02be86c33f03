"""vLLM under governance: a plugin and a connector, no fork. docs/reference/engines/vllm.md; why so: docs/build/adr/."""
