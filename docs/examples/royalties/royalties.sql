SELECT statement, owner, sum(plays) AS plays FROM statements GROUP BY statement, owner
