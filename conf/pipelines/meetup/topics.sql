SELECT received_at, explode(`group`.group_topics.topic_name) AS topic
FROM rsvps
