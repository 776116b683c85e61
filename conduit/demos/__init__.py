"""Two short trainers with Conduit, to run and to read: `dqn` (PyTorch, off-policy) and `ppo` (JAX, on-policy)."""
