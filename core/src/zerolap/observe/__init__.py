"""What a run reports: traces, statistics, pictures. It looks at the runtime, which does not know it."""
