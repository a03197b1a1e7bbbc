// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * The first process of a test VM: mounts file systems, runs commands, powers the VM off.
 *
 * `agent SPEC` carries out SPEC. Output of the commands goes to the virtio ports pagetide.stdout and
 * pagetide.stderr, the result of each command to pagetide.status.
 *
 * SPEC is a list of strings, each ended by a NUL:
 *
 *	"overlay" DIRECTORY		makes it writable, until the VM's end
 *	"9p" TAG DIRECTORY		mounts the host's share of that name
 *	"dir" DIRECTORY			where the commands that follow run
 *	"env" "NAME=VALUE"		added to their environment, which is otherwise empty
 *	"write" FILE TEXT		into a file of /proc or /sys, before the command that follows
 *	"timeout" SECONDS		for each of them; 0: none
 *	"run" COUNT ARGUMENT...		a command
 *
 * pagetide.status gets a line for each command, "exit CODE", "signal NUMBER" or "timeout 0", each
 * followed by the command's time in ms, and "end" after the last. With more than one command, each one's
 * output starts with a line of the record separator (0x1e) and the command's number, on both ports.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "share.h"

/* How long the agent still reads output after a command has ended and left a process behind. */
#define DRAIN_MS 1000

/* How long the agent waits for the host's ports. */
#define PORTS_MS 60000

/* How often processes are reaped that a command's processes have left. */
#define REAP_MS 200

#define MAX_ENV 256

struct spec {
	char *text, *end;	/* the rest that is not read yet */
	char *env[MAX_ENV + 1];
	int nr_env;
	long timeout_s;
	int commands;		/* their total number */
};

static int out_port, err_port, status_port;

/* Prints to the console, whose output the host saves. */
static void complain(const char *format, ...)
{
	char text[512] = "<3>pagetide-agent: ";
	size_t used = strlen(text);
	va_list args;
	int fd;

	va_start(args, format);
	vsnprintf(text + used, sizeof(text) - used - 1, format, args);
	va_end(args);
	strcat(text, "\n");
	fd = open("/dev/kmsg", O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		if (write(fd, text, strlen(text)) < 0)
			perror(text);
		close(fd);
	}
}

/* Without "end" on the status port the host counts the VM as lost. */
static void __attribute__((noreturn)) power_off(void)
{
	sync();
	reboot(RB_POWER_OFF);
	_exit(1);
}

static void __attribute__((noreturn)) give_up(const char *what, const char *which)
{
	complain("%s %s: %s", what, which, strerror(errno));
	power_off();
}

static void write_all(int fd, const char *bytes, size_t count)
{
	while (count > 0) {
		ssize_t written = write(fd, bytes, count);

		if (written < 0 && errno == EINTR)
			continue;
		if (written < 0)
			give_up("write to", "the host");
		bytes += written;
		count -= written;
	}
}

static void report(const char *how, int value, long ms)
{
	char line[64];
	int length = snprintf(line, sizeof(line), "%s %d %ld\n", how, value, ms);

	write_all(status_port, line, length);
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void mount_at(const char *source, const char *type, const char *where, const char *options)
{
	mkdir(where, 0755);
	if (mount(source, where, type, 0, options) && errno != EBUSY)
		complain("mount %s: %s", where, strerror(errno));
}

/* Writes to a directory stay in the VM's memory. */
static void overlay(const char *where)
{
	static int number;
	char base[32], upper[64], work[64], options[512];

	snprintf(base, sizeof(base), "/run/overlay%d", number++);
	snprintf(upper, sizeof(upper), "%s/upper", base);
	snprintf(work, sizeof(work), "%s/work", base);
	snprintf(options, sizeof(options), "lowerdir=%s,upperdir=%s,workdir=%s", where, upper, work);
	if (mkdir(base, 0755) || mkdir(upper, 01777) || chmod(upper, 01777) || mkdir(work, 0755))
		give_up("mkdir", base);
	if (mount("overlay", where, "overlay", 0, options))
		give_up("make writable", where);
}

static void share(const char *tag, const char *where)
{
	if (mount(tag, where, "9p", 0, P9_OPTIONS))
		give_up("mount", where);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		complain("%s: %s", path, strerror(errno));
	if (fd >= 0)
		close(fd);
}

/* udev would make links by name; without udev, sysfs has the names. */
static int find_port(const char *wanted)
{
	const char *class = "/sys/class/virtio-ports";
	DIR *dir = opendir(class);
	struct dirent *entry;
	int fd = -1;

	if (!dir)
		give_up("open", class);
	while (fd < 0 && (entry = readdir(dir))) {
		char path[512], name[64] = "";
		FILE *file;

		snprintf(path, sizeof(path), "%s/%s/name", class, entry->d_name);
		file = fopen(path, "re");
		if (!file)
			continue;
		if (fgets(name, sizeof(name), file))
			name[strcspn(name, "\n")] = '\0';
		fclose(file);
		if (strcmp(name, wanted))
			continue;
		snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
		fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0)
			give_up("open", path);
	}
	closedir(dir);
	return fd;
}

/* The host names its ports some time after their driver was loaded. */
static int open_port(const char *wanted)
{
	struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };
	long deadline = now_ms() + PORTS_MS;
	int fd;

	while ((fd = find_port(wanted)) < 0 && now_ms() < deadline)
		nanosleep(&pause, NULL);
	if (fd < 0) {
		errno = ENOENT;
		give_up("no virtio port", wanted);
	}
	return fd;
}

/* The next string of the spec; NULL at its end. */
static char *next(struct spec *spec)
{
	char *text = spec->text;

	if (text >= spec->end)
		return NULL;
	spec->text += strlen(text) + 1;
	return text;
}

static char *need(struct spec *spec)
{
	char *text = next(spec);

	if (!text) {
		errno = EINVAL;
		give_up("the spec", "ends early");
	}
	return text;
}

static void read_spec(struct spec *spec, const char *path)
{
	struct stat stat;
	ssize_t count;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &stat))
		give_up("open", path);
	spec->text = malloc(stat.st_size + 1);
	if (!spec->text)
		give_up("read", path);
	spec->end = spec->text;
	while ((count = read(fd, spec->end, spec->text + stat.st_size - spec->end)) > 0)
		spec->end += count;
	if (count < 0)
		give_up("read", path);
	*spec->end = '\0';
	close(fd);
}

/* Counts the commands without running them. */
static int count_commands(struct spec spec)
{
	char *key;
	int commands = 0;

	while ((key = next(&spec))) {
		long strings = 1;

		if (!strcmp(key, "run")) {
			strings = atol(need(&spec));
			commands++;
		} else if (!strcmp(key, "9p") || !strcmp(key, "write")) {
			strings = 2;
		}
		while (strings-- > 0)
			need(&spec);
	}
	return commands;
}

static void __attribute__((noreturn)) become(char **argv, char **env, int out, int err)
{
	int null = open("/dev/null", O_RDONLY);

	setsid();
	if (null < 0 || dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
		_exit(126);
	environ = env;
	execvp(argv[0], argv);
	dprintf(2, "%s: %s\n", argv[0], strerror(errno));
	_exit(errno == ENOENT ? 127 : 126);
}

/* Copies the available output to the host; returns false at the end of the stream. */
static bool copy(int from, int to)
{
	char bytes[65536];
	ssize_t count = read(from, bytes, sizeof(bytes));

	if (count < 0)
		return errno == EINTR || errno == EAGAIN;
	write_all(to, bytes, count);
	return count > 0;
}

/* How long poll() may sleep. */
static int until(long deadline)
{
	long left;

	if (!deadline)
		return REAP_MS;
	left = deadline - now_ms();
	if (left > REAP_MS)
		return REAP_MS;
	return left > 0 ? left : 0;
}

/* Reaps processes whose parents have ended. Until then they count as processes, for kill(2) and in /proc. */
static void reap_others(pid_t command)
{
	siginfo_t ended = { 0 };

	while (!waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) && ended.si_pid) {
		/* Its status is for its waiter, which is about to ask for it. */
		if (ended.si_pid == command)
			return;
		waitpid(ended.si_pid, NULL, 0);
		ended.si_pid = 0;
	}
}

static void run(struct spec *spec, char **argv)
{
	long started = now_ms();
	long deadline = spec->timeout_s ? started + spec->timeout_s * 1000 : 0;
	enum { OUT, ERR, END };
	struct pollfd fds[3];
	bool timed_out = false;
	long ended = started;
	int out[2], err[2], status;
	pid_t pid;

	if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC))
		give_up("pipe for", argv[0]);
	pid = fork();
	if (pid < 0)
		give_up("fork for", argv[0]);
	if (!pid)
		become(argv, spec->env, out[1], err[1]);
	close(out[1]);
	close(err[1]);
	fds[OUT] = (struct pollfd){ .fd = out[0], .events = POLLIN };
	fds[ERR] = (struct pollfd){ .fd = err[0], .events = POLLIN };
	fds[END] = (struct pollfd){ .fd = syscall(SYS_pidfd_open, pid, 0), .events = POLLIN };
	if (fds[END].fd < 0)
		give_up("pidfd_open for", argv[0]);

	/* poll() ignores a negative fd: the stream has ended. */
	while (fds[OUT].fd >= 0 || fds[ERR].fd >= 0 || fds[END].fd >= 0) {
		int ready = poll(fds, 3, until(deadline));

		if (ready < 0 && errno != EINTR)
			give_up("poll for", argv[0]);
		reap_others(pid);
		if (ready > 0 && fds[OUT].revents && !copy(out[0], out_port))
			fds[OUT].fd = -1;
		if (ready > 0 && fds[ERR].revents && !copy(err[0], err_port))
			fds[ERR].fd = -1;
		if (ready > 0 && fds[END].revents) {
			close(fds[END].fd);
			fds[END].fd = -1;
			ended = now_ms();
			deadline = ended + DRAIN_MS;
		}
		if (!deadline || now_ms() < deadline)
			continue;
		if (fds[END].fd < 0)
			break;
		timed_out = true;
		kill(-pid, SIGKILL);
		deadline = 0;
	}
	/* Processes that the command left must not disturb the next command. */
	kill(-pid, SIGKILL);
	close(out[0]);
	close(err[0]);
	if (waitpid(pid, &status, 0) != pid)
		give_up("wait for", argv[0]);
	if (timed_out)
		report("timeout", 0, ended - started);
	else if (WIFSIGNALED(status))
		report("signal", WTERMSIG(status), ended - started);
	else
		report("exit", WEXITSTATUS(status), ended - started);
}

static void run_next(struct spec *spec, int number)
{
	long count = atol(need(spec));
	char **argv;

	if (count < 1) {
		errno = EINVAL;
		give_up("a command", "without words");
	}
	argv = calloc(count + 1, sizeof(*argv));
	if (!argv)
		give_up("memory for", "a command");
	for (long i = 0; i < count; i++)
		argv[i] = need(spec);
	if (spec->commands > 1) {
		char line[32];
		int length = snprintf(line, sizeof(line), "\x1e%d\n", number);

		write_all(out_port, line, length);
		write_all(err_port, line, length);
	}
	run(spec, argv);
	free(argv);
}

static void loopback_up(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request))
		complain("loopback: %s", strerror(errno));
	if (fd >= 0)
		close(fd);
}

static void prepare(void)
{
	struct rlimit unlimited = { RLIM_INFINITY, RLIM_INFINITY };

	mount_at("proc", "proc", "/proc", NULL);
	mount_at("sysfs", "sysfs", "/sys", NULL);
	mount_at("devtmpfs", "devtmpfs", "/dev", NULL);
	mount_at("devpts", "devpts", "/dev/pts", NULL);
	mount_at("tmpfs", "tmpfs", "/dev/shm", "mode=1777");
	mount_at("tmpfs", "tmpfs", "/run", "mode=755");
	mount_at("debugfs", "debugfs", "/sys/kernel/debug", NULL);
	symlink("/proc/self/fd", "/dev/fd");
	symlink("/proc/self/fd/0", "/dev/stdin");
	symlink("/proc/self/fd/1", "/dev/stdout");
	symlink("/proc/self/fd/2", "/dev/stderr");
	/* shmem uses huge pages only with this setting, and only where a program requests them */
	write_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise");
	setrlimit(RLIMIT_MEMLOCK, &unlimited);
	sethostname("pagetide", strlen("pagetide"));
	loopback_up();
	umask(022);
}

static void obey(struct spec *spec, const char *key)
{
	static int number;
	char *word;

	if (!strcmp(key, "run")) {
		run_next(spec, number++);
		return;
	}
	word = need(spec);
	if (!strcmp(key, "overlay")) {
		overlay(word);
	} else if (!strcmp(key, "9p")) {
		share(word, need(spec));
	} else if (!strcmp(key, "write")) {
		write_file(word, need(spec));
	} else if (!strcmp(key, "dir")) {
		if (chdir(word))
			give_up("chdir to", word);
	} else if (!strcmp(key, "env")) {
		if (spec->nr_env == MAX_ENV) {
			errno = E2BIG;
			give_up("environment:", word);
		}
		spec->env[spec->nr_env++] = word;
	} else if (!strcmp(key, "timeout")) {
		spec->timeout_s = atol(word);
	} else {
		errno = EINVAL;
		give_up("unknown key in the spec:", key);
	}
}

int main(int argc, char **argv)
{
	struct spec spec = { 0 };
	char *key;

	if (getpid() != 1 || argc != 2) {
		fprintf(stderr, "usage: %s SPEC, as the first process of a VM\n", argv[0]);
		return 2;
	}
	prepare();
	out_port = open_port("pagetide.stdout");
	err_port = open_port("pagetide.stderr");
	status_port = open_port("pagetide.status");
	read_spec(&spec, argv[1]);
	spec.commands = count_commands(spec);
	while ((key = next(&spec)))
		obey(&spec, key);
	write_all(status_port, "end\n", 4);
	power_off();
}
