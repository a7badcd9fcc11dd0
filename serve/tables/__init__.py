"""Tables in memory: state, tail, replay."""
