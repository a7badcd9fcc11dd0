"""Ways to a subscriber: one module a transport. What is sent, and when, is the hub's business."""
