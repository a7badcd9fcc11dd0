SELECT
  window.start AS window_start,
  window.end AS window_end,
  visitor,
  count(*) AS views
FROM actions
WHERE kind = 'view'
GROUP BY window(event_time, '1 hour'), visitor
