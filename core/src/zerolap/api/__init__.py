"""What users call. Public names are those of ``zerolap`` itself; where they live is not."""
