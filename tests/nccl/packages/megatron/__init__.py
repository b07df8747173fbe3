"""A stand-in for megatron-core 0.20: the state of expert parallelism in its modules."""
