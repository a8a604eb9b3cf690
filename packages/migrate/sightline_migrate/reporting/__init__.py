"""Call counts, log files, the report, the scan of a script before it runs, sync points, advice for errors."""
