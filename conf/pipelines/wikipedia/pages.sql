SELECT event_time, concat(wiki, ' ', title) AS page
FROM edits
WHERE type IN ('edit', 'new') AND coalesce(meta.domain, '') <> 'canary'
