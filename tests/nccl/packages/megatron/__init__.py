"""A stand-in for megatron-core 0.19: the state of expert parallelism in its modules."""
