"""What is told of a run: traces, statistics, pictures. It looks at the runtime, which knows nothing of it."""
