"""The validation of a device in stages: what each stage asks, how it answers, what is kept (`benchmarks/gpu.sh`)."""
