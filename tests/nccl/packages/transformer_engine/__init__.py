"""A stand-in for TransformerEngine: the communicator that its expert parallelism borrows."""
