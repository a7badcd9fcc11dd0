SELECT
  impressions.page AS page,
  count(*) AS clicks,
  sum(unix_millis(clicks.event_time) - unix_millis(impressions.event_time)) AS waited_ms,
  max(unix_millis(clicks.event_time) - unix_millis(impressions.event_time)) AS longest_ms
FROM joined
GROUP BY impressions.page
