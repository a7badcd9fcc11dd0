SELECT event_time, concat(wiki, ' ', user) AS editor
FROM edits
WHERE type IN ('edit', 'new') AND coalesce(meta.domain, '') <> 'canary'
