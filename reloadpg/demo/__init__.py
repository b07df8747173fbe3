"""The demo: a colocated reinforcement-learning loop whose groups are offloaded and reloaded."""
