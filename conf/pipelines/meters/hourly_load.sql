SELECT
  window.start AS window_start,
  window.end AS window_end,
  customer,
  count(*) AS readings,
  sum(wh) AS wh,
  max(wh) AS most_wh,
  min(seq) AS first_seq,
  max(seq) AS last_seq
FROM readings
GROUP BY window(event_time, '1 hour'), customer
