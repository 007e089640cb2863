"""The contract of a backend, and what is common to all of them. No backend is named here."""
