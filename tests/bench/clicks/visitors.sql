SELECT received_at, visitor
FROM views
