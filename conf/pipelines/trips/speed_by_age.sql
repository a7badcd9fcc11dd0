SELECT
  window.start AS window_start,
  window.end AS window_end,
  CASE WHEN age < 25 THEN 'under 25' WHEN age < 40 THEN '25 to 39' WHEN age < 60 THEN '40 to 59' ELSE '60 and over' END
    AS age_group,
  count(*) AS rides,
  sum(metres) AS metres,
  sum(seconds) AS seconds
FROM trips
GROUP BY
  window(event_time, '30 minutes', '5 seconds'),
  CASE WHEN age < 25 THEN 'under 25' WHEN age < 40 THEN '25 to 39' WHEN age < 60 THEN '40 to 59' ELSE '60 and over' END
