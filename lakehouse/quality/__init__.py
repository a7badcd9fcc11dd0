"""Quality gates: expectations of events in the stream, of batches before they are committed, and of tables."""
