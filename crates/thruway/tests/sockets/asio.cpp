// Boost.Asio with its io_uring back end: messages to and fro, then much in each direction, with bytes that are checked.
//
//     asio serve PORT
//     asio ask PORT
#include <boost/asio.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t message_length = 300, bulk_length = 16 << 20;
constexpr int rounds = 3000;

static unsigned char byte_at(std::size_t at) { return (at * 2654435761u) >> 24; }

static void must(bool holds, const char *what) {
    if (!holds) {
        std::printf("failed: %s\n", what);
        std::exit(1);
    }
}

// An echo, to the end of what comes.
struct Session : std::enable_shared_from_this<Session> {
    tcp::socket socket;
    std::vector<unsigned char> bytes = std::vector<unsigned char>(1 << 16);
    explicit Session(tcp::socket s) : socket(std::move(s)) {}
    void go() {
        auto self = shared_from_this();
        socket.async_read_some(asio::buffer(bytes), [self](error_code error, std::size_t n) {
            if (error)
                return;
            asio::async_write(self->socket, asio::buffer(self->bytes, n), [self](error_code error, std::size_t) {
                if (!error)
                    self->go();
            });
        });
    }
};

static void accept_next(tcp::acceptor &acceptor) {
    acceptor.async_accept([&acceptor](error_code error, tcp::socket socket) {
        if (!error) {
            socket.set_option(tcp::no_delay(true));
            std::make_shared<Session>(std::move(socket))->go();
        }
        accept_next(acceptor);
    });
}

struct Client {
    tcp::socket socket;
    std::vector<unsigned char> out = std::vector<unsigned char>(bulk_length), in = std::vector<unsigned char>(bulk_length);
    int round = 0;
    std::size_t length = message_length;
    explicit Client(asio::io_context &context) : socket(context) {}

    // Sends and receives at once, as both are much at the end.
    void go() {
        for (std::size_t i = 0; i < length; i++)
            out[i] = byte_at(i + round);
        std::memset(in.data(), 0, length);
        asio::async_write(socket, asio::buffer(out, length), [](error_code error, std::size_t) { must(!error, "write"); });
        asio::async_read(socket, asio::buffer(in, length), [this](error_code error, std::size_t) {
            must(!error, "read");
            must(std::memcmp(in.data(), out.data(), length) == 0, "bytes");
            if (++round > rounds)
                return socket.close();
            if (round == rounds)
                length = bulk_length;
            go();
        });
    }
};

int main(int, char **args) {
    asio::io_context context;
    tcp::endpoint endpoint(asio::ip::address_v4::loopback(), std::atoi(args[2]));
    if (std::strcmp(args[1], "serve") == 0) {
        tcp::acceptor acceptor(context, endpoint);
        accept_next(acceptor);
        context.run();
    } else {
        Client client(context);
        client.socket.async_connect(endpoint, [&client](error_code error) {
            must(!error, "connect");
            client.socket.set_option(tcp::no_delay(true));
            client.go();
        });
        context.run();
        must(client.round == rounds + 1, "rounds");
        std::puts("all right");
    }
}
