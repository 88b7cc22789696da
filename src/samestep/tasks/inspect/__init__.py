"""What is asked about a job and the engines before any launch."""
