"""Bronze rows made into typed events, or into quarantine rows with a reason."""
