"""HTTP routes and documents."""
