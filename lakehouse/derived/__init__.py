"""What is derived from products while they change: views, alerts, and the queries that are added at run time."""
