SELECT
  window.start AS window_start,
  window.end AS window_end,
  country,
  count(*) AS viewed,
  sum(load_ms) AS load_ms
FROM views
GROUP BY window(event_time, '30 seconds'), country
