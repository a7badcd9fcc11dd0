/* The load client of bench_fanout where there is a C compiler: thousands of subscribers on one epoll, about 2 us a
 * message, so that the benchmark does not measure its own client. fanout_load.py is the same in Python.
 *
 * Arguments: host port subscribers first filters transport(websocket|sse) stopped file
 * Prints "ready" when every subscriber has its snapshot. Commands on standard input: "count" (begin to count), "end N"
 * (wait until every reader has change N, print one JSON object, exit). `file` gets pairs of float32: number of the
 * change, ms from its "at" (CLOCK_MONOTONIC, ns) to the recv that brought it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ROOM (1 << 20)  /* the largest message (a snapshot's part) and a recv behind it */
#define SLICE (1 << 18)

struct subscriber {
    int fd, upgraded;
    long seen, missed, repeated;
    size_t held;  /* bytes of a message that has not come whole */
    char *rest;
};

static struct subscriber *all, **by_fd;
static char *host, *transport, *file;
static int port, total, first, filters, stopped, sse, poller;
static long delivered, closed_by_server, snapshots;
static int counting;
static float *delays;
static size_t delays_count, delays_room;
static char buffer[ROOM + SLICE];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void open_one(int number) {
    struct subscriber *one = &all[number];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    char where[128] = "", request[512];
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1, small = 4096;
    if (fd < 0) fail("socket");
    if (number < stopped) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    inet_pton(AF_INET, host, &address.sin_addr);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (filters > 1) snprintf(where, sizeof where, "&where=part%%20%%3D%%20'p%d'", (first + number) % filters);
    int size = snprintf(request, sizeof request, "GET /v1/subscribe?table=fan%s HTTP/1.1\r\nHost: %s\r\n%s\r\n", where, host,
                        sse ? "Accept: text/event-stream\r\n"
                            : "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                              "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n");
    if (write(fd, request, size) != size) fail("write");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    *one = (struct subscriber){.fd = fd, .seen = -1};
    by_fd[fd] = one;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
}

static void message(struct subscriber *one, char *start, size_t size, int64_t now) {
    char *seq_at = memmem(start, size, "\"seq\":", 6);
    if (!seq_at) return;  /* a heartbeat, or a change without a row for this subscriber */
    long seq = strtol(seq_at + 6, NULL, 10);
    if (one->seen < 0) {
        snapshots++;
    } else {
        if (counting) {
            char *at = memmem(start, size, "\"at\":", 5);
            while (at && at < seq_at) at = memmem(at + 5, start + size - at - 5, "\"at\":", 5);
            delivered++;
            if (delays_count + 2 > delays_room) delays = realloc(delays, (delays_room = delays_room * 2 + 65536) * sizeof *delays);
            delays[delays_count++] = seq;
            delays[delays_count++] = at ? (now - strtoll(at + 5, NULL, 10)) / 1e6 : -1;
        }
        if (seq <= one->seen) one->repeated++;
        else one->missed += seq - one->seen - 1;
    }
    if (seq > one->seen) one->seen = seq;
}

static size_t take_frames(struct subscriber *one, unsigned char *data, size_t size, int64_t now) {
    size_t at = 0;
    while (size - at >= 2) {
        size_t length = data[at + 1], start = at + 2;
        if (length == 126) {
            if (size - at < 4) break;
            length = data[at + 2] << 8 | data[at + 3], start = at + 4;
        } else if (length == 127) {
            if (size - at < 10) break;
            length = 0, start = at + 10;
            for (int i = 2; i < 10; i++) length = length << 8 | data[at + i];
        }
        if (start + length > size) break;
        int kind = data[at] & 15;
        if (kind == 9) {
            unsigned char pong[131] = {0x8a, 0x80 | length, 0, 0, 0, 0};
            memcpy(pong + 6, data + start, length);
            if (write(one->fd, pong, 6 + length) < 0) closed_by_server++;
        } else if (kind == 8) {
            closed_by_server++;
        } else {
            message(one, (char *)data + start, length, now);
        }
        at = start + length;
    }
    return at;
}

static size_t take_events(struct subscriber *one, char *data, size_t size, int64_t now) {
    char *at = data, *end;
    while ((end = memmem(at, data + size - at, "\n\n", 2))) {
        message(one, at, end - at, now);
        at = end + 2;
    }
    return at - data;
}

static void receive(struct subscriber *one) {
    if (one->held) memcpy(buffer, one->rest, one->held);
    ssize_t got = recv(one->fd, buffer + one->held, SLICE, 0);
    int64_t now = now_ns();
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        closed_by_server++;
        epoll_ctl(poller, EPOLL_CTL_DEL, one->fd, NULL);
        return;
    }
    size_t size = one->held + got, taken = 0;
    if (!one->upgraded) {
        char *end = memmem(buffer, size, "\r\n\r\n", 4);
        if (end) {
            if (memcmp(buffer, "HTTP/1.1 101", 12) && memcmp(buffer, "HTTP/1.1 200", 12)) {
                fprintf(stderr, "%.*s\n", (int)size, buffer);
                exit(1);
            }
            one->upgraded = 1;
            taken = end + 4 - buffer;
        }
    }
    if (one->upgraded)
        taken += sse ? take_events(one, buffer + taken, size - taken, now)
                     : take_frames(one, (unsigned char *)buffer + taken, size - taken, now);
    size_t held = size - taken;
    if (held > ROOM) {
        fprintf(stderr, "a message of more than %d bytes\n", ROOM);
        exit(1);
    }
    if (held) {
        one->rest = realloc(one->rest, held);
        memcpy(one->rest, buffer + taken, held);
    } else if (one->held) {
        free(one->rest);
        one->rest = NULL;
    }
    one->held = held;
}

/* Read whatever is there; whether a command has come. Where a turn found something, half a millisecond is let pass: a
 * client that sleeps until the next message would have the server pay for waking it 10,000 times, which no subscriber on
 * another machine does. It counts into the delays. */
static int turn(int timeout_ms) {
    struct epoll_event events[512];
    int count = epoll_wait(poller, events, 512, timeout_ms), command = 0;
    for (int i = 0; i < count; i++) {
        if (events[i].data.fd == 0) command = 1;
        else receive(by_fd[events[i].data.fd]);
    }
    if (counting && count > 0 && count < 512) usleep(500);
    return command;
}

int main(int argc, char **argv) {
    if (argc != 9) return fprintf(stderr, "arguments: host port subscribers first filters transport stopped file\n"), 2;
    host = argv[1], port = atoi(argv[2]), total = atoi(argv[3]), first = atoi(argv[4]), filters = atoi(argv[5]);
    transport = argv[6], stopped = atoi(argv[7]), file = argv[8], sse = !strcmp(transport, "sse");
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    all = calloc(total, sizeof *all);
    by_fd = calloc(total + 1024, sizeof *by_fd);
    poller = epoll_create1(0);
    for (int opened = 0; snapshots < total;) {
        while (opened < total && opened - snapshots < 200) open_one(opened++);
        turn(1000);
        if (closed_by_server) return fprintf(stderr, "%ld connections were closed before the start\n", closed_by_server), 1;
    }
    for (int i = 0; i < stopped; i++) epoll_ctl(poller, EPOLL_CTL_DEL, all[i].fd, NULL);
    puts("ready");
    fflush(stdout);
    struct epoll_event commands = {.events = EPOLLIN, .data.fd = 0};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, 0, &commands)) fail("epoll_ctl");
    char line[64];
    long last = 0;
    double cpu_before = 0;
    while (1) {
        if (!turn(1000)) continue;
        if (!fgets(line, sizeof line, stdin)) return 1;
        if (!strncmp(line, "count", 5)) counting = 1, cpu_before = cpu_s();
        if (sscanf(line, "end %ld", &last) == 1) break;
    }
    epoll_ctl(poller, EPOLL_CTL_DEL, 0, NULL);
    for (int64_t until = now_ns() + 20000000000; now_ns() < until; turn(50)) {
        int behind = 0;
        for (int i = stopped; i < total && !behind; i++) behind = all[i].seen < last;
        if (!behind) break;
    }
    long lost = 0, twice = 0;
    for (int i = stopped; i < total; i++) {
        lost += all[i].missed + (all[i].seen < last ? last - all[i].seen : 0);
        twice += all[i].repeated;
    }
    FILE *out = fopen(file, "wb");
    if (!out || fwrite(delays, sizeof *delays, delays_count, out) != delays_count || fclose(out)) fail(file);
    printf("{\"delivered\": %ld, \"lost\": %ld, \"twice\": %ld, \"closed\": %ld, \"cpu_s\": %.3f}\n", delivered, lost, twice,
           closed_by_server, cpu_s() - cpu_before);
    return 0;
}
